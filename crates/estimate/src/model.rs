//! Models: layers, their input, and the loss of training.

use std::rc::Rc;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{
    AllocatorKind, Dtype, Eager, Error, Named, Result, Shape, Step, StepMemory, Tensors, Types, layer::build,
    model_check, settings::COMPUTE,
};

/// A model as data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Model {
    /// Its name.
    pub name: String,
    /// Its input.
    pub input: Input,
    /// Its layers, one after the other.
    pub layers: Vec<Named>,
    /// The loss that training minimizes.
    #[serde(default)]
    pub loss: Loss,
}

/// The input of a model, without the batch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Input {
    /// Sequences of this many tokens.
    Tokens(u64),
    /// Sequences of tokens for an encoder, and sequences for a decoder.
    Pair {
        /// The number of tokens that the encoder reads.
        source: u64,
        /// The number of tokens that the decoder reads. In training they are the labels, shifted by one position.
        target: u64,
    },
    /// Numbers of this shape, such as (3, 224, 224).
    Numbers(Shape),
    /// Numbers of this shape for an encoder, and sequences of tokens for a decoder.
    NumbersAndTokens {
        /// The shape.
        numbers: Shape,
        /// The number of tokens that the decoder reads. In training they are the labels, shifted by one position.
        target: u64,
    },
}

/// The loss that training minimizes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Loss {
    /// Cross entropy with one label for each row of the output.
    #[default]
    CrossEntropy,
    /// Cross entropy with the next token as the label, of logits in `f32`, as transformers computes it.
    NextToken,
    /// Cross entropy with one label for each token, as for masked tokens.
    Token,
    /// The mean of the squared differences from numbers of the output's shape.
    MeanSquares,
}

impl Model {
    /// Reads a model from JSON. An error names the layer. A field that does not exist is an error.
    ///
    /// # Errors
    /// Returns an error if the text is not JSON, or is not a model.
    pub fn from_json(text: &str) -> Result<Self> {
        Self::checked(serde_json::from_str(text).map_err(|error| error.to_string()))
    }

    /// Reads a model from TOML, with the same names as in JSON.
    ///
    /// ```
    /// use gpumem_estimate::{Model, Step};
    ///
    /// let model = r#"
    ///     name = "small"
    ///     input = { numbers = [3, 8, 8] }
    ///     layers = [
    ///         { name = "conv", type = "conv", inputs = 3, outputs = 4, kernel = [3, 3], padding = [1] },
    ///         { name = "relu", type = "activation", function = "relu" },
    ///     ]"#;
    /// let estimate = Step::inference(1).estimate(&Model::from_toml(model)?)?;
    /// assert_eq!(estimate.parameters, 4 * 3 * 3 * 3 + 4);
    /// # Ok::<(), gpumem_estimate::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if the text is not TOML, or is not a model.
    pub fn from_toml(text: &str) -> Result<Self> {
        Self::checked(toml::from_str(text).map_err(|error| error.message().to_owned()))
    }

    fn checked(fields: Result<Value, String>) -> Result<Self> {
        let model = fields.and_then(|fields| model_check::read(&fields));
        model.map_err(|why| Error::invalid(format!("this is not a model: {why}")))
    }

    /// Returns the model as JSON.
    ///
    /// # Errors
    /// Returns the error of `serde_json`. No model is known to cause one.
    pub fn to_json(&self) -> Result<String> {
        serde_json::to_string_pretty(self).map_err(|error| Error::invalid(error.to_string()))
    }

    /// Returns the parameters of the model, each named by the path of its layer: two parameters of one layer have the
    /// same name. Tied weights are counted once.
    ///
    /// # Errors
    /// Returns an error if the sizes of a layer are not valid, or if the sum is too large to be counted.
    pub fn parameters(&self, dtype: Dtype) -> Result<Tensors> {
        let memory = Rc::new(StepMemory::new(AllocatorKind::Exact, u64::MAX, true));
        let eager = Eager::new(Rc::clone(&memory), Step::default(), false);
        memory.open("model");
        build(&eager, &self.layers, Types::new(dtype, COMPUTE))?;
        Ok(Tensors::new(eager.list_parameters()))
    }

    /// Returns the shape of a decoder's input for a batch.
    pub(crate) fn target(&self, batch: u64) -> Option<Shape> {
        match &self.input {
            Input::Pair { target, .. } | Input::NumbersAndTokens { target, .. } => Some(Shape::from([batch, *target])),
            Input::Tokens(_) | Input::Numbers(_) => None,
        }
    }

    /// Returns the shape and type of the input for a batch.
    pub(crate) fn input(&self, batch: u64) -> (Shape, Dtype) {
        match &self.input {
            Input::Tokens(length) | Input::Pair { source: length, .. } => (Shape::from([batch, *length]), Dtype::I64),
            Input::Numbers(shape) | Input::NumbersAndTokens { numbers: shape, .. } => {
                let mut sizes = vec![batch];
                sizes.extend(shape.sizes());
                (sizes.into(), Dtype::F32)
            }
        }
    }
}
