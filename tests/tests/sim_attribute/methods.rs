//! Tests methods and functions of traits.

#![allow(clippy::boxed_local, clippy::unused_self)]
use super::*;
use std::rc::Rc;
use std::sync::Arc;

#[derive(Clone, Default)]
struct Model<T = u8> {
    weight: T,
}

impl<T: Clone + Default> Model<T> {
    #[gpu_mem_trace]
    fn by_ref(&self) -> &T {
        &self.weight
    }

    #[gpu_mem_trace]
    fn by_mut(&mut self) -> &mut T {
        &mut self.weight
    }

    #[gpu_mem_trace]
    fn by_value(mut self) -> T {
        self.weight = T::default();
        self.weight
    }

    #[gpu_mem_trace]
    fn boxed(self: Box<Self>) -> T {
        self.weight
    }

    #[gpu_mem_trace]
    fn rc(self: Rc<Self>) -> T {
        self.weight.clone()
    }

    #[gpu_mem_trace]
    fn arc(self: &Arc<Self>) -> &T {
        &self.weight
    }

    #[gpu_mem_trace]
    fn pinned(self: Pin<&mut Self>) {}

    #[gpu_mem_trace]
    fn associated() -> Self {
        Self::default()
    }

    #[gpu_mem_trace]
    fn generic<U>(&self, u: U) -> U {
        u
    }
}

#[test]
fn with_every_receiver() {
    let mut model = Model { weight: 1 };
    check(|| assert_eq!(model.by_ref(), &1), ["Model::by_ref"]);
    check(|| *model.by_mut() = 2, ["Model::by_mut"]);
    check(|| model.clone().by_value(), ["Model::by_value"]);
    check(|| Box::new(model.clone()).boxed(), ["Model::boxed"]);
    check(|| Rc::new(model.clone()).rc(), ["Model::rc"]);
    let shared = Arc::new(model.clone());
    check(|| assert_eq!(shared.arc(), &2), ["Model::arc"]);
    check(|| Pin::new(&mut model).pinned(), ["Model::pinned"]);
    check(Model::<u8>::associated, ["Model::associated"]);
    check(|| model.generic("u"), ["Model::generic"]);
}

trait Layer<T> {
    fn forward(&self, input: T) -> T;

    #[gpu_mem_trace]
    fn twice(&self, input: T) -> T {
        self.forward(self.forward(input))
    }

    #[gpu_mem_trace]
    fn create() -> Self
    where
        Self: Default,
    {
        Self::default()
    }

    fn generic_default() {}
}

impl<T> Layer<T> for Model<Vec<T>> {
    #[gpu_mem_trace]
    fn forward(&self, input: T) -> T {
        input
    }
}

impl Layer<i32> for [f32] {
    #[gpu_mem_trace]
    fn forward(&self, input: i32) -> i32 {
        input
    }
}

mod elsewhere {
    use super::*;

    impl<T> Layer<T> for Model<Option<T>> {
        #[gpu_mem_trace]
        fn forward(&self, input: T) -> T {
            input
        }
    }

    impl Model<bool> {
        #[gpu_mem_trace]
        pub(super) fn from_elsewhere() {}
    }
}

#[test]
fn of_traits() {
    let model = Model { weight: vec![1] };
    check(|| model.forward(1), ["Model::forward"]);
    let twice = ["  Model::twice > Model::forward", "  Model::twice > Model::forward", "Model::twice"];
    check(|| model.twice(1), twice);
    check(<Model<Vec<u8>> as Layer<u8>>::create, ["Model::create"]);
    check(|| [1.0].as_slice().forward(1), ["[f32]::forward"]);
    check(|| Model { weight: Some(1) }.forward(1), ["Model::forward"]);
    check(Model::from_elsewhere, ["Model::from_elsewhere"]);
    check(<Model<Vec<u8>> as Layer<u8>>::generic_default, []);
}

#[test]
fn called_through_a_trait_object() {
    trait Object {
        #[gpu_mem_trace]
        fn call(&self) {}
    }
    impl Object for u8 {}
    let object: &dyn Object = &1_u8;
    check(|| object.call(), ["u8::call"]);
}
